check:
	ruff check .
	mypy
	pytest

run:
	cct run recipes/compo.yaml

.PHONY: check run
