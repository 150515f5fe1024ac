"""Other projects, where installed, each called as its own users would call it."""
