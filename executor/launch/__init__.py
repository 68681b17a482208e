"""Starting, watching and ending processes: ranks under torchrun's agent, budgets, heartbeats, records on disk.

May import `topology` and `simulator`. Never imports torch.
"""
