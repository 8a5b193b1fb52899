"""Sites and long links on one machine: `atoll lab run` starts a command's workers in them.

`topology` reads the sites and links, `runner` starts and ends a lab, `inside` is its first process,
`emulator` carries the packets between sites, `report` sums up the links' traffic. docs/lab.md explains the
lab.
"""
