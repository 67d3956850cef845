"""`python -m mok info`."""

import argparse

import mok


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mok", description=mok.__doc__)
    parser.add_argument("command", choices=["info"], help="info: versions, devices and usable backends")
    parser.parse_args()
    mok.info()


if __name__ == "__main__":
    main()
