"""Find the fastest way to train a model here, by measuring: `nanoray tune`, and `nanoray.tune(main)`."""
