"""Models and processors of Transformers with our positions."""
