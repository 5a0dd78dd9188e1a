"""The target model: one decoder for every supported family, and its Hugging Face door."""
