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
    report(plan, "runs/kinds")

What a variant is about is the recipe's business; here it is a name and flags.
"""

from zoo.ablation.cells import CellsFailed, run_cells
from zoo.ablation.plan import Plan, Variant
from zoo.ablation.report import Report, describe, report
from zoo.ablation.results import collect, write_results
from zoo.ablation.stats import Comparison, Summary, compare, holm, smallest_difference, summarise

__all__ = [
    "CellsFailed",
    "Comparison",
    "Plan",
    "Report",
    "Summary",
    "Variant",
    "collect",
    "compare",
    "describe",
    "holm",
    "report",
    "run_cells",
    "smallest_difference",
    "summarise",
    "write_results",
]
