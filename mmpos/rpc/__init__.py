"""Messages of the service, and objects as messages and back; ``v1`` is generated from proto/ by `make proto`."""
