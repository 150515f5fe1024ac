"""Studies of schemes and of other pipelines: diagnosis of ids, properties compared, pictures."""
