"""What fits on the device, and making it ready."""
