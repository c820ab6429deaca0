"""Pages: a run, and a model's attention, as one HTML file each that loads nothing."""

from zoo.pages.run_report import add_samples, reported, write_run_report

__all__ = ["add_samples", "reported", "write_run_report"]
