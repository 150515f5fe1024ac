"""Examples side by side: packs, batches with their table, masks, and the shares of ranks."""
