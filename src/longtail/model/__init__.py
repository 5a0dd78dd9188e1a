"""The target model: one decoder for every supported family, its kernels and Hugging Face files."""
