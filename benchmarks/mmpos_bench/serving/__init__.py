"""The other processes of the service suite, and what is asked of them."""
