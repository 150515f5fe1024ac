"""The service's messages, and conversion of objects to and from them; ``v1`` is generated from proto/ by `make proto`."""
