"""The words: ranks, components, remedies, the engine, the policy, growth, the report. Pure: no I/O, no clock."""
