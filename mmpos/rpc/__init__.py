"""The service's messages, and object conversion to and from them; ``v1`` is generated from proto/ by `make proto`."""
