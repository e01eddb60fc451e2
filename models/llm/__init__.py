"""Language models behind one asynchronous call: clients, the call ledger, retries and limits."""
