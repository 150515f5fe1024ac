"""The service's messages, and conversion of objects to and from them; `make proto` generates ``v1`` from proto/."""
