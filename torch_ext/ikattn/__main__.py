"""python -m ikattn"""

from ikattn.cli import main

raise SystemExit(main())
