"""What the compiler writes out of a plan.

forward.py       the plan's steps as instructions: kernels on a rank's pieces, exchanges between ranks
phases.py        operators that exchange statistics, as kernels with exchanges between them
backward.py      the same instructions in reverse: gradients, and the exchanges that are dual to those before
runnable.py      all of it as a program that the executor runs and the simulator times
"""
