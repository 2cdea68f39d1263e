"""The soak: rounds upon rounds under random kills, stops, joins and corruptions (docs/soak.md).

`python -m soak --rounds N --seed S` from this folder's parent; read `driver.py` first. `model.py` is what is served,
`processes.py` runs in the trainer's and the workers' processes, `fleet.py` holds the workers as the driver knows them,
`ledger.py` what every version was, `events.py` what is done to whom. It lies here and not in a test because spawned
processes must be able to import it.
"""
