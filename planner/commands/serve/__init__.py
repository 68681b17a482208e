"""What commands do with `--task serve`; loaded when it is asked for. May import what commands may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.io.on_demand import on_demand

if TYPE_CHECKING:
    from planner.commands.serve.apply import apply_serving_plan as apply_serving_plan
    from planner.commands.serve.check import check_serving_command as check_serving_command
    from planner.commands.serve.compare import compare_serving as compare_serving
    from planner.commands.serve.estimate import estimate_serving_plan as estimate_serving_plan
    from planner.commands.serve.estimate import is_serving_plan as is_serving_plan
    from planner.commands.serve.estimate import serving_flags as serving_flags
    from planner.commands.serve.explain import explain_serving_plan as explain_serving_plan
    from planner.commands.serve.export import export_serving_plan as export_serving_plan
    from planner.commands.serve.suggest import suggest_serving as suggest_serving
    from planner.commands.serve.validate import validate_serving as validate_serving

__getattr__ = on_demand(
    __name__,
    {
        "apply": "apply_serving_plan",
        "check": "check_serving_command",
        "compare": "compare_serving",
        "estimate": "estimate_serving_plan is_serving_plan serving_flags",
        "explain": "explain_serving_plan",
        "export": "export_serving_plan",
        "suggest": "suggest_serving",
        "validate": "validate_serving",
    },
)
