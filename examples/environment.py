"""Import this before torch and transformers: it sets variables that they read on import."""

from patrickstar.finetune.usage import set_environment

set_environment()
