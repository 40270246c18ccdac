"""The words of the product: ids, errors, models, life cycle, limits. Pure: no I/O, no async, standard library only."""
