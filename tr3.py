import sys; sys.path.insert(0,'/work/ckpt')
import time
from pathlib import Path
t0=time.time()
from advisor.replay import *
print('import',time.time()-t0)
tr=load_trace(Path('/work/shared/data/traces/mooncake_conversation_trace.jsonl.gz'));print('load',time.time()-t0)
import json
ref=json.load(open('/work/shared/data/traces/reference.json'))['conversation']['rows']
for p in ('lru','lfu'):
    for c in (1000,5859,100000):
        t=time.time();r=replay_trace(tr,p,c).result();k=ref[f'{p.upper()}|{c}'];print(p,c,round(time.time()-t,2),all(getattr(r,x)==k[x] for x in k))
