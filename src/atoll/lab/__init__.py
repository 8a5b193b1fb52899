"""Sites and long links on one machine: `atoll lab run` starts a command's workers in them.

`topology` reads what a lab is made of, `runner` makes and ends one, `inside` is its first process, `emulator`
carries the packets between its sites, `report` says what the links did. docs/lab.md explains it.
"""
