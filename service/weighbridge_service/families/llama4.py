"""Llama 4, which mbridge does not support: an example of a family that lists its rules itself.

Hugging Face stacks the experts of a layer in one tensor, with transposed matrices. Attention needs no permutation: both
sides rotate neighbouring elements (Megatron-core with ``rotary_interleaved``). A trainer of the multimodal model uses
transformers' vision tower.
"""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge_service.families.decoders import Decoder
from weighbridge_service.families.family import Family
from weighbridge_service.families.rules import WHOLE, Rule


class Llama4(Family):
    """Llama 4 with images (``llama4``) and its language model alone (``llama4_text``)."""

    experts_field = "num_local_experts"

    def rules(self) -> Sequence[Rule]:
        """Rules of the language model, and one rule for each tensor of the vision tower."""
        prefix = "" if self.text_config is self.transformers_config else "language_model."
        decoder = Decoder(
            self.head_counts(),
            ours=prefix,
            theirs=f"{prefix}model.",
            output_layer=f"{prefix}lm_head.weight",
            mlp="feed_forward",
            router="router",
            shared="shared_expert",
        )
        return [
            *decoder.rules(),
            *decoder.stacked_experts(),
            *(
                Rule(name, (name,), WHOLE)
                for name in self.hugging_face_shapes()
                if name.startswith(("vision_model.", "multi_modal_projector."))
            ),
        ]
