"""The push: one version from its opening to its being durable, failed or aborted."""
