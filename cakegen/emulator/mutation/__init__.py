"""Programs with one thing wrong, and whether the emulator notices; docs/mutation.md holds the numbers."""
