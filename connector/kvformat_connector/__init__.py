"""A vLLM V1 KV connector that saves and loads KV cache as kvformat objects."""
