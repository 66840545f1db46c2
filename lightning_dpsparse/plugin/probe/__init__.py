"""Does every example's loss depend on that example alone? Measured, before anything is released."""
