"""Pages: a run, and a model's attention, as one HTML file each that loads nothing."""

from zoo.pages.run_report import attempted, reported, write_run_report

__all__ = ["attempted", "reported", "write_run_report"]
