"""Fuzzing of every parser that reads what others have sent or written.

May import: whatever the parsers need. This file and `worker` import none of the packages under test: these are
instrumented as they are imported.

- `target`: a parser under test: its samples, the errors that it may raise, and what one input may cost.
- `judge`: verdict on one input: what it cost, and whether that or its outcome is a finding.
- `mutators`: changes to inputs that know their structure.
- `findings`: inputs that are findings: told apart, made small, kept as files.
- `worker`: process that runs one target, under coverage by atheris or without.
- `campaign`: run over many targets: shares inputs out, starts workers, and tells what came of it.
- `targets`: the targets.
- `found`: inputs that were findings once, one folder for each target; tests run them all.
"""
