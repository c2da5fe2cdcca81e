"""The frozen LLM: finding and loading it, its layers and hooks, its tokenizer and chat template, its head."""
