"""``patrickstar finetune``: tunes a causal language model of Hugging Face on conversations."""
