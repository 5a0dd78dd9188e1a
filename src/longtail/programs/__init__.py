"""Programs behind verbs: supervised fine-tuning, and work on drafters."""
