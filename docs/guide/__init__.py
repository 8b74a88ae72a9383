"""
.. include:: guard.md
.. include:: fault.md
.. include:: monitor.md
.. include:: step.md
.. include:: emulated.md
.. include:: trust.md
.. include:: results.md
"""
