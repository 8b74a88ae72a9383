"""
.. include:: guard.md
.. include:: experiments.md
.. include:: fault.md
.. include:: monitor.md
.. include:: mx.md
.. include:: kernels.md
.. include:: step.md
.. include:: emulated.md
.. include:: trust.md
.. include:: speed.md
.. include:: results.md
"""
