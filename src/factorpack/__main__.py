"""`python -m factorpack`: the command line, where its script is not on the path."""

from factorpack.commands import main

if __name__ == "__main__":
    main()
