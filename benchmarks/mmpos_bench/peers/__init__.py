"""Other projects, where installed, each driven as its own users do."""
