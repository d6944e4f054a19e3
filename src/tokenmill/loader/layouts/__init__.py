"""How a store is cut into rows: `concat`, `best-fit` and `pad`, one file each."""
