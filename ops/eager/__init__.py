"""The operations in plain torch: they run on every device, and other backends fall back to them."""
