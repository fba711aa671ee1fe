"""Methods: selectors, fates and recalls by name, and the layers that are assembled from them."""
