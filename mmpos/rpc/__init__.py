"""Generated from proto/ by `make proto`; nothing here is written by hand."""
