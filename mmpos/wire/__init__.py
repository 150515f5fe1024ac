"""Messages to objects and back: ``put_*`` fills a message, ``get_*`` reads one and checks it."""
