"""What ``finetune_llm.py`` is made of: conversations, their tokens, models to train, and data that Python ships."""
