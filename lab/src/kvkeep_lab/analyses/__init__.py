"""What the papers look at inside a model, on any model and text: spectra, alignment, reactivation, rank."""
