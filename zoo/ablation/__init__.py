"""Ablations: variants times seeds, each cell a training run, and the differences they show.

    plan = Plan(
        "recipes/train_vit.py",
        variants=[Variant("softmax"), Variant("window", {"attention": "window"})],
        seeds=range(5),
        flags={"epochs": 20},
        baselines=["softmax"],
    )
    print(describe(plan, "runs/kinds"))
    run_cells(plan, "runs/kinds", workers=2)
    report(plan, "runs/kinds")  # tables, effects.png, report.html

What a variant is about is the recipe's business; here it is a name and flags.
"""

from zoo.ablation.analysis import Report
from zoo.ablation.cells import CellsFailed, run_cells
from zoo.ablation.forecast import describe, seconds_of_cell
from zoo.ablation.options import AblationOptions
from zoo.ablation.plan import Plan, Variant, split_commas
from zoo.ablation.report import report
from zoo.ablation.results import collect, write_results
from zoo.ablation.stats import (
    Comparison,
    Summary,
    compare,
    compare_pairs,
    holm,
    smallest_difference,
    summarise,
)

__all__ = [
    "AblationOptions",
    "CellsFailed",
    "Comparison",
    "Plan",
    "Report",
    "Summary",
    "Variant",
    "collect",
    "compare",
    "compare_pairs",
    "describe",
    "holm",
    "report",
    "run_cells",
    "seconds_of_cell",
    "smallest_difference",
    "split_commas",
    "summarise",
    "write_results",
]
