"""`ait_llm.dump`: where the tool keeps its ways to dump."""
