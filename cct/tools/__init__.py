"""What looks at recipes, parts and runs from outside: nothing that trains imports it, the command line calls it."""
