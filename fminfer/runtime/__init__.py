"""The engine on its ranks: processes, loading, assembly, memory, data groups."""
