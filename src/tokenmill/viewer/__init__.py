"""A store, a run or a build in the browser: `tokenmill view`.

stores.py     what the page shows of a store: overview, documents, rejected rows
batches.py    the rows that a loader would draw, and what packings waste
runs.py       trainings by their metrics, builds by what they have written
desk.py       everything that was named, by numbers
server.py     a small server for this machine alone, and the verb `view`
page.html     the page, with page.css and page.js; uplot/ draws its charts

Shows what library functions answer, and writes nothing. The home of starlette and uvicorn.
"""
