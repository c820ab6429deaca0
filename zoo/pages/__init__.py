"""Pages: a run, and a model's attention, as one HTML file each that loads nothing."""
