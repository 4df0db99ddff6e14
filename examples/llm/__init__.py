"""Parts of ``finetune_llm.py``: conversations, their tokens, models to train, and data that Python ships."""
